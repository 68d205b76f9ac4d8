--[[
slurm-resilience: SLURM_RESILIENT=1 in the environment of sbatch is the same as --comment=resilient, for users who want it
for all their jobs.  Nothing else is touched; an error in here lets the command go on.

Put it beside slurm.conf as cli_filter.lua, with CliFilterPlugins=lua.  A site's own goes on working as
cli_filter_site.lua in the same folder.
]]

local folder = (debug.getinfo(1, "S").source:match("^@(.*/)")) or "/etc/slurm/"
slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit = nil, nil, nil
local file = io.open(folder .. "cli_filter_site.lua", "r")
if file then
  file:close()
  dofile(folder .. "cli_filter_site.lua")
end
local site_defaults, site_pre, site_post = slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit

local function prepare(options)
  local asked = os.getenv("SLURM_RESILIENT")
  if options["type"] ~= "sbatch" or asked == nil or asked == "" or asked == "0" then
    return
  end
  local comment = options["comment"]
  if comment == nil or comment == "" then
    options["comment"] = "resilient"
  elseif not comment:match("^resilient%f[^%w_]") then
    options["comment"] = "resilient " .. comment
  end
end

function slurm_cli_setup_defaults(options, early)
  return site_defaults and site_defaults(options, early) or slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  if site_pre then
    local answer = site_pre(options, offset)
    if answer ~= slurm.SUCCESS then
      return answer
    end
  end
  local worked, why = pcall(prepare, options)
  if not worked then
    slurm.log_error("slurm-resilience: cli_filter.lua: %s", tostring(why))
  end
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
  return site_post and site_post(offset, job, step) or slurm.SUCCESS
end

return slurm.SUCCESS
